"""What goes wrong through no fault of the program."""


class UserError(Exception):
    """Bad input: what is wrong, where, and what to do, in one line. The command line exits with 2."""


class Infeasible(UserError):
    """A demand no plan can meet; the message gives the nearest one that can be met."""

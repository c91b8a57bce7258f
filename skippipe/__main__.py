from skippipe.cli import main

main()

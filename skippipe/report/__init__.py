"""How people see a plan: as text (`grid`), as a page (`html`), as an image (`png`) and as a trace (`trace`).

`picture` and `pathmap` work out what is drawn where; `html` and `png` only draw it. What all pages, images and tables
have in common, those of studies and evaluations too, is in `page`, `image` and `table`. `run` shows what became of a
plan. The drawing libraries take a second to load, so nothing here imports them until a page or an image is asked for.
"""

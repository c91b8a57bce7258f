"""Reports of a plan: as text (`summary`), as a page (`html`), as an image (`png`) and as a Chrome trace (`gantt`).

`gantt` and `path_map` work out what is drawn where; `html` and `png` only draw it. They also have what all pages and
images have in common, those of studies and evaluations too; tables and key figures are in `summary`. `run` reports a
run. The drawing libraries take a second to load, so they are imported only where a page or an image is made.
"""

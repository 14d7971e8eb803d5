"""`snclr explore`: a local web page of a run: neighbors, map, curves, views and curation.

`opened_run` reads runs and features; one module computes the data of each screen; `server` serves them, `static` writes
them to a folder. The page itself is plain ES modules and CSS in `assets/`.
"""

"""`snclr explore`: a local web page of a run: neighbors, map, curves, views and curation.

`opened_run` reads runs and features; `explorer` holds them and the image sets; each screen has a module in `screens/`;
`server` serves them, `static` writes them to a folder. The page itself is plain ES modules and CSS in `assets/`.
"""

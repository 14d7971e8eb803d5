"""`snclr explore`: a local web page that shows what the encoder sees.

`run_data` reads runs and features; one module computes the data of each screen; `server` serves them, `static` writes
them to a folder. The page itself is plain ES modules and CSS in `assets/`.
"""

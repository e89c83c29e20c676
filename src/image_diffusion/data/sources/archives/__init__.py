"""Sources that keep many images in one file: zips, tars and databases."""

"""`tidepool backup` and `tidepool restore`: the database, the files and the keys, in one folder with a manifest."""

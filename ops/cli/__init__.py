"""The commands of `tidepool`, one file for each group."""

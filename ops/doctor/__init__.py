"""`tidepool doctor`: gathers facts of an installation, checks them, says what to do. Imports the store."""

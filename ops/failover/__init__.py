"""`tidepool failover`: an operator makes a region's standby of Postgres the primary."""

"""Benchmarks of gateways: latency a hop, heartbeats, isolation of tenants."""

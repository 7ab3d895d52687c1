"""The source of the Grafana boards in `ops/deploy/dashboards`; `python -m ops.deploy.boards` writes them."""

"""What an operator deploys beside Tidepool: boards, alert rules, and examples of how to load them."""

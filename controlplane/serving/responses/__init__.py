"""The Responses API, pure: requests become messages for nodes, and what nodes stream becomes its objects and events."""

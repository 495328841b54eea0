"""The run: the only place that knows both the policy and the fleet."""

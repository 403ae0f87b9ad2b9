"""Every policy on the same arrivals at each of its settings, beside a plan that knows the future."""

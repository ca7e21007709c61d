"""How a plan reaches the workers: in this process now, others behind the same verbs later."""

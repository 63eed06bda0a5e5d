"""What tells a user about calls and parameters: plans, checks, reports."""

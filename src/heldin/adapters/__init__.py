"""What the integrations with training frameworks share."""

"""What every launch needs."""

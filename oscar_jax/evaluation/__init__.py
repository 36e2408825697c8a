"""What two bits cost: methods side by side on unseen text."""

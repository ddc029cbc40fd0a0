"""Ground that every other package stands on: errors, contracts, events, this machine's hardware."""

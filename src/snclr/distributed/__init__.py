"""Several ranks: launch, collectives, synchronized batch norm."""

"""Export of encoders to the formats of other libraries."""

"""Methods or settings × seeds under one budget: plan, subprocess runs, records, statistics and tables."""

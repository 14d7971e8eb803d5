"""Methods or settings × seeds under one budget: the runs, their records, and the tables made from these."""

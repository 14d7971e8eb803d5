"""The methods that also compare the shuffled patches of a view: PIRL and DetCo."""

"""The data of each screen of the page, as JSON values and arrays."""

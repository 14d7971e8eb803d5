"""Analysis of a set of features: neighbor graph, 2-D layouts, and curation of the images."""

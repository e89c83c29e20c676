"""A trained model -> a data set of its images for other programs, and a scorecard of its utility and privacy."""

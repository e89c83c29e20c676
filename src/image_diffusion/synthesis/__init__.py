"""A trained model -> a data set of its images that other programs read, and a scorecard of its use and its risk."""

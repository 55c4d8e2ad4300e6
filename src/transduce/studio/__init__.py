"""Web application that shows models at work: attention, search, steps, attributions."""

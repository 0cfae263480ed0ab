"""The one step function of a job: it applies an event, asks the rules, and says what is to be done. Pure."""

"""Other libraries on the ops. Each module imports its library when it is called, not before."""

"""`dora-rl dashboard RUN`: a run in the browser, live or finished. Reads only, never writes."""

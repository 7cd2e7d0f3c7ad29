"""From the flags to the pipeline that runs: what is asked, refused, planned."""

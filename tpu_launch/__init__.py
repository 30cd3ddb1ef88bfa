"""Where the runs are made: facts about TPU slices and ways to reach them."""

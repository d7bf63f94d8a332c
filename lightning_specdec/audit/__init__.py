"""Is the output the target's? What finds it out, by three checks that each stand beside a biased rule."""

"""The page on which a schedule is seen and felt, and the small server behind it."""

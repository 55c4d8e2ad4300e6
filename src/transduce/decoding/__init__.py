"""Generation: one token loop, with the strategies and rules that steer it, and the scoring of given pairs."""

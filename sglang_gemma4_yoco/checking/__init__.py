"""On this machine and with these weights: does the fast path give what stock gives?"""

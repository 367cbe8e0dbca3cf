"""Columns of a packed row after the D columns of the observation.

The last two describe the episode that this step ended and are zero elsewhere. Environments with SAME_STEP autoreset
append the episode's last observation (D columns).
"""

REWARD, TERMINATED, TRUNCATED, EPISODE_RETURN, EPISODE_LENGTH, NUM_EXTRA = range(6)

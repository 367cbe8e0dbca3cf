"""Statistics over seeds: Student's and Welch's 95 % intervals of means, differences and ratios, and tests of
losses."""

import math
import warnings

import numpy as np
from scipy import stats


def expect_nan():
    """Return a context without warnings about samples of one value or without noise, whose statistics are
    nan."""
    return warnings.catch_warnings(action="ignore", category=RuntimeWarning)


def find_interval(values, others=(0, 0)):
    """Return Welch's 95 % interval of the mean of `values` minus that of `others`: Student's if these have no
    noise.

    None if a sample has one value, or infinite or unknown ones; nan at both ends if there is no noise at all.
    """
    if min(len(values), len(others)) < 2 or not np.isfinite([*values, *others]).all():
        return None
    with expect_nan():
        return tuple(stats.ttest_ind(values, others, equal_var=False).confidence_interval())


def choose_center(*samples: list):
    """Return the function that finds the center of samples: the geometric mean, or else the median.

    There is none if a value is not positive, unknown or infinite, such as the time to a threshold that was
    never reached.
    """
    values = np.concatenate(samples)
    return stats.gmean if np.isfinite(values).all() and (values > 0).all() else np.median


def find_ratio(ours: list, peer: list):
    """Return the ratio of the centers (`choose_center`) of both samples, and its 95 % interval.

    The interval is Welch's on the logarithms, so it is one of the ratio of the geometric means. What cannot
    be computed is nan or None.
    """
    if not min(*ours, *peer) > 0:
        return math.nan, None
    center = choose_center(ours, peer)
    with expect_nan():  # infinite over infinite
        ratio = center(ours) / center(peer) or math.nan
    interval = find_interval(np.log(ours), np.log(peer))
    return ratio, interval and tuple(np.exp(interval))


def find_p_worse(base, new, are_paired: bool):
    """Return p values of "losses [..., seeds] are not larger in NEW", by Student's t.

    If both have the same seeds, it is twice the smaller p of the test of pairs and of the test of two
    samples.
    """
    with expect_nan():
        p = stats.ttest_ind(new, base, axis=-1, alternative="greater").pvalue
        if are_paired:
            paired = stats.ttest_rel(new, base, axis=-1, alternative="greater").pvalue
            p = np.minimum(1, 2 * np.minimum(p, paired))
    return np.nan_to_num(p, nan=1)  # one seed on each side, or equal values without noise, have none


def find_half_width(values):
    """Return half of Student's 95 % interval of means over the first axis; nan for one value."""
    with expect_nan():
        return stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)

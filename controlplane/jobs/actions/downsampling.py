"""What jobs told of their progress is thinned once it is old: they train for months, and tell each
second.

One statement does it: whoever is killed has thinned all of a batch or nothing, and whoever goes on
needs to know of nothing but the rows.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import connection

#: Each sample of a job's progress is kept for so long as it was told; then one for each minute.
EACH_KEPT = timedelta(days=3)
#: So many samples are thinned at a time: whoever does it has other things to do as well.
BATCH = 5000

# Of each group: kept, *others = rows.order_by("-at"), of what is due and what stands for its minute
# already; kept.update(steps=Sum("steps") and so on); others.delete().
# Epochs stay apart, for in each other replicas trained, and so do losses that were no numbers: sums
# and means are then the same as before.
_THIN_SQL = """
WITH due AS (
    SELECT *, date_trunc('minute', at) AS minute, loss IS NULL AS lossless
    FROM jobs_progresssample
    WHERE NOT thinned AND at < date_trunc('minute', %(before)s)
    ORDER BY at LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED -- those steps are being told anew: their turn comes
), there AS (
    SELECT sample.*, minute, lossless
    FROM (SELECT DISTINCT job_id, epoch, minute, lossless FROM due) AS part
    CROSS JOIN LATERAL ( -- so that each minute is looked up by its index
        SELECT * FROM jobs_progresssample AS one
        WHERE one.job_id = part.job_id AND one.at >= minute
          AND one.at < minute + interval '1 minute' AND one.thinned
          AND one.epoch = part.epoch AND (one.loss IS NULL) = lossless
        FOR UPDATE SKIP LOCKED
    ) AS sample
), rows AS (
    SELECT *, steps::float8 / sum(steps)
           OVER (PARTITION BY job_id, epoch, minute, lossless) AS weight
    FROM (SELECT * FROM due UNION ALL SELECT * FROM there) AS told
), kept AS (
    SELECT (array_agg(id ORDER BY at DESC, id DESC))[1] AS id,
           least(sum(steps), 2147483647) AS steps,
           least(sum(samples), 2147483647) AS samples,
           -- What is all but nothing would fall below the least number that there is.
           sum(CASE WHEN abs(loss) > 1e-200 THEN loss * weight ELSE 0 * loss END) AS loss,
           sum(CASE WHEN abs(step_s) > 1e-200 THEN step_s * weight ELSE 0 END) AS step_s,
           max(max_gap_s) AS max_gap_s
    FROM rows GROUP BY job_id, epoch, minute, lossless
), gone AS (
    DELETE FROM jobs_progresssample
    WHERE id IN (SELECT id FROM rows EXCEPT SELECT id FROM kept)
)
UPDATE jobs_progresssample AS sample
SET thinned = true, steps = kept.steps, samples = kept.samples, loss = kept.loss,
    step_s = kept.step_s, max_gap_s = kept.max_gap_s
FROM kept WHERE sample.id = kept.id
"""


def thin_progress(now: datetime) -> int:
    """Let one sample stand for each minute of a job's progress from before EACH_KEPT; of what is
    due some at a time. Returns how many minutes were thinned, the parts of a minute among them."""
    with connection.cursor() as cursor:
        cursor.execute(_THIN_SQL, {"before": now - EACH_KEPT, "batch": BATCH})
        thinned: int = cursor.rowcount
        return thinned

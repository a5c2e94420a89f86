"""lm-evaluation-harness on a kvboost engine. `kvboost.integrations.lm_eval` is the way in."""

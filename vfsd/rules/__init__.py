"""Which operation may happen: rules, approvals, hooks and quotas, judged in the funnels."""

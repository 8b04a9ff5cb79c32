"""The gated delta rule: gated_delta_rule over chunks of tokens, gated_delta_rule_step for one."""

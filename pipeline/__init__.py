"""The staged jobs: recipe, plan, store, runner, stages, report, command line."""

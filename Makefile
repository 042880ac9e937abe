# Every target is the scripts/stack command of the same name; more options go in
# ARGS: make apply ARGS="--base ../vllm"
.PHONY: help doctor apply status lint verify test export version clean codegen \
	hipgate prove show drop new build image serve smoke bench accept

help:
	@scripts/stack --help

doctor apply status lint verify test export version clean codegen hipgate:
	@scripts/stack $@ $(ARGS)

# make prove PATCH="one two"; make new PATCH=topic-what
prove show drop new:
	@scripts/stack $@ $(PATCH) $(ARGS)

# make build PLAN=1; make serve RECIPE=tp4; make smoke URL=http://127.0.0.1:8000
build image:
	@scripts/stack $@ $(if $(PLAN),--dry-run) $(ARGS)

serve:
	@scripts/stack $@ $(RECIPE) $(if $(PLAN),--dry-run) $(ARGS)

smoke bench:
	@scripts/stack $@ $(URL) $(if $(RECIPE),--recipe $(RECIPE)) $(ARGS)

accept:
	@scripts/stack $@ $(URL) $(if $(RECIPE),--recipe $(RECIPE)) \
		$(if $(GSM8K),--gsm8k $(GSM8K)) $(ARGS)

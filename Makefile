# Every target is the scripts/stack command of the same name; more options go in
# ARGS: make apply ARGS="--base ../vllm"
.PHONY: help doctor apply status lint verify test export version clean codegen \
	hipgate prove show drop new rebase drift graph ledger range-diff pr bisect build \
	image serve smoke bench accept

help:
	@scripts/stack --help

doctor apply status lint verify test export version clean codegen hipgate graph ledger:
	@scripts/stack $@ $(ARGS)

# make prove PATCH="one two"; make new PATCH=topic-what
prove show drop new:
	@scripts/stack $@ $(PATCH) $(ARGS)

# make rebase TO=0.33.0; make rebase ARGS=--continue; make drift TO="0.23.0 0.26.0"
rebase drift:
	@scripts/stack $@ $(foreach release,$(TO),--to $(release)) $(ARGS)

# make range-diff A=v0.22.0 B=v0.33.0
range-diff:
	@scripts/stack $@ $(A) $(B) $(ARGS)

# make pr PATCH=topic-what ONTO=../vllm
pr:
	@scripts/stack $@ $(PATCH) --onto $(ONTO) $(ARGS)

# make bisect CMD="pytest -p harness.plugin tests/x.py"
bisect:
	@scripts/stack $@ run $(ARGS) -- $(CMD)

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

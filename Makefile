# Every target is the scripts/stack command of the same name; more options go in
# ARGS: make apply ARGS="--base ../vllm"
.PHONY: help doctor apply status lint verify test export version clean codegen \
	hipgate prove show drop new

help:
	@scripts/stack --help

doctor apply status lint verify test export version clean codegen hipgate:
	@scripts/stack $@ $(ARGS)

# make prove PATCH="one two"; make new PATCH=topic-what
prove show drop new:
	@scripts/stack $@ $(PATCH) $(ARGS)

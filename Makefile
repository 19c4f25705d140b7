# tare: out-of-tree build in build/. `make` builds build/tare; `make check` runs every test.
# Folders under src/kern/cpu get instruction-set flags of their own; everything else is x86-64-v2.
BUILD   ?= build
CC      ?= gcc
PKGS     = libcjson libmicrohttpd libpcre2-8 libutf8proc libxxhash sqlite3 libcrypto
WARN     = -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wstrict-prototypes \
           -Wmissing-prototypes -Wvla -Werror
SAN     ?=
OPT     ?= -O2 -g
PKGFLAGS := $(shell pkg-config --cflags $(PKGS) 2>/dev/null)
PKGLIBS  := $(shell pkg-config --libs $(PKGS) 2>/dev/null)
CFLAGS   = -std=c11 -D_GNU_SOURCE -Isrc -march=x86-64-v2 -ffp-contract=off -pthread $(WARN) $(OPT) $(SAN) $(PKGFLAGS)
LDFLAGS  = -pthread $(SAN)
LDLIBS   = $(PKGLIBS) -lm -ldl

SRCS := $(sort $(shell find src -name '*.c'))
OBJS := $(SRCS:src/%.c=$(BUILD)/obj/%.o)
LIB  := $(BUILD)/libtare.a
UNIT := $(sort $(wildcard tests/unit/test_*.c) $(wildcard tests/diff/test_*.c) $(wildcard tests/torture/test_*.c))
UNIT_BIN := $(patsubst tests/%.c,$(BUILD)/tests/%,$(UNIT))

ISA_avx2   = -mavx2 -mfma -mf16c -mbmi2
ISA_avx512 = -mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vbmi -mavx512vnni
ISA_amx    = $(ISA_avx512) -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16
isa = $(if $(findstring kern/cpu/avx2/,$1),$(ISA_avx2))$(if $(findstring kern/cpu/avx512/,$1),$(ISA_avx512))$(if $(findstring kern/cpu/amx/,$1),$(ISA_amx))

.PHONY: all lib tests emulated check demo clean
all: $(BUILD)/tare
lib: $(LIB)

$(BUILD)/tare: $(BUILD)/obj/cli/main.o $(LIB)
	@echo "  LINK  $@"
	@$(CC) $(LDFLAGS) -o $@ $< $(LIB) $(LDLIBS)

$(LIB): $(filter-out $(BUILD)/obj/cli/main.o,$(OBJS))
	@echo "  AR    $@"
	@rm -f $@ && ar rcs $@ $^

$(BUILD)/obj/%.o: src/%.c Makefile
	@mkdir -p $(@D)
	@echo "  CC    $<"
	@$(CC) $(CFLAGS) $(call isa,$<) -MMD -MP -c -o $@ $<

$(BUILD)/tests/%: tests/%.c $(LIB) tests/unit/check.h
	@mkdir -p $(@D)
	@echo "  TEST  $@"
	@$(CC) $(CFLAGS) -Itests/unit -MMD -MP -MF $@.d -o $@ $< $(LIB) $(LDFLAGS) $(LDLIBS) -lcmocka

tests: $(UNIT_BIN) $(BUILD)/libtare-emulated.so

# Plain GPU kernels as C++ for the CPU (kern/cuda/emulate.h): the plug-in that tests of the GPU open.
EMU_SRCS := $(sort $(wildcard src/kern/cuda/plain_*.cu)) src/kern/cuda/prefill.cu src/kern/cuda/table.cu src/kern/cuda/comm.cu src/kern/cuda/emulate.cc
EMU_SRCS += src/kern/cuda/attention.cu src/kern/cuda/decode.cu src/kern/cuda/prefill90.cu
EMU_OBJS := $(patsubst src/%,$(BUILD)/emulated/%.o,$(EMU_SRCS))
EMU_FLAGS = -std=c++17 -DTARE_EMULATED -Isrc -fPIC -fvisibility=hidden -ffp-contract=off -O2 -g \
            -pthread -Wall -Wextra -Wno-unknown-pragmas -Werror $(EMU_ALIGNED)
# A GPU faults where a vector is read at an address that it is not aligned to.
EMU_ALIGNED = -fsanitize=alignment -fno-sanitize-recover=alignment
emulated: $(BUILD)/libtare-emulated.so
$(BUILD)/libtare-emulated.so: $(EMU_OBJS)
	@echo "  LINK  $@"
	@$(CXX) -shared -pthread -Wl,-z,defs $(EMU_ALIGNED) -o $@ $^ -lm
$(BUILD)/emulated/%.o: src/% Makefile
	@command -v $(firstword $(CXX)) >/dev/null || { echo "emulated: no C++ compiler ($(CXX)) here: the tests of GPU \
	kernels need one (tools/setup.sh check installs g++)"; exit 1; }
	@mkdir -p $(@D)
	@echo "  CXX   $<"
	@$(CXX) $(EMU_FLAGS) -MMD -MP -c -o $@ -x c++ $<
$(BUILD)/tests/unit/test_gpu_%: CFLAGS += -DGPU_PLUGIN='"$(BUILD)/libtare-emulated.so"'
$(filter %/test_gpu_%,$(UNIT_BIN)): | $(BUILD)/libtare-emulated.so

clean:
	rm -rf $(BUILD)

-include $(OBJS:.o=.d) $(UNIT_BIN:=.d) $(EMU_OBJS:.o=.d)

# ---- tests, demonstration, sanitizers, installation ---------------------------------------------
JOBS ?= $(shell nproc)
.PHONY: asan ubsan tsan fuzz bench cuda gpu-check install eval golden docs format
check:
	@$(MAKE) --no-print-directory -j$(JOBS) all tests
	@tools/run_tests.sh $(BUILD)

demo:
	@$(MAKE) --no-print-directory -j$(JOBS) all
	@tools/demo.sh $(BUILD)

# The unit programs once more under each sanitizer, in a build folder of their own.
asan ubsan tsan:
	@$(MAKE) --no-print-directory -j$(JOBS) BUILD=build/$@ OPT="-O1 -g" SAN="$(SAN_$@)" all tests
	@tools/run_unit.sh build/$@
SAN_asan  = -fsanitize=address -fno-omit-frame-pointer
# GCC 12 sees a null format in every vsnprintf that UBSan guards.
SAN_ubsan = -fsanitize=undefined -fno-sanitize-recover=undefined -Wno-format-truncation
SAN_tsan  = -fsanitize=thread

bench: $(patsubst bench/%.c,$(BUILD)/bench/%,$(wildcard bench/*.c))
	@for b in $^; do echo "== $$b"; $$b || exit 1; done
$(BUILD)/bench/%: bench/%.c $(LIB)
	@mkdir -p $(@D)
	@$(CC) $(CFLAGS) -o $@ $< $(LIB) $(LDFLAGS) $(LDLIBS)

# libFuzzer targets (clang); FUZZ_SECONDS each.
FUZZ_SECONDS ?= 60
fuzz:
	@tools/fuzz.sh $(FUZZ_SECONDS)

# GPU code: compiled where nvcc is, with the compiler's report held against the rules (no spills, no
# serialized wgmma), into the plug-in libtare-cuda.so and the programs build/cuda/bench/*. Plain
# kernels also run on GPUs before sm_90.
NVCC ?= $(firstword $(wildcard /usr/local/cuda/bin/nvcc) nvcc)
NVFLAGS = -O3 -Isrc -std=c++17 -gencode=arch=compute_90a,code=sm_90a -Xcompiler -Wall,-Wextra,-fPIC,-fvisibility=hidden -Xptxas -v
NV_older = $(foreach sm,80 86 89,-gencode=arch=compute_$(sm),code=sm_$(sm))
CU_SRCS := $(sort $(wildcard src/kern/cuda/*.cu))
CU_OBJS := $(CU_SRCS:src/%.cu=$(BUILD)/cuda/%.o)
CU_BENCH := $(patsubst bench/cuda/%.cu,$(BUILD)/cuda/bench/%,$(sort $(wildcard bench/cuda/*.cu)))
CU_PACK := $(BUILD)/obj/kern/gpu/pack.o $(BUILD)/obj/num/num.o
cuda:
	@if ! command -v $(NVCC) >/dev/null 2>&1; then echo "cuda: no nvcc here, GPU code is not compiled"; \
	else $(MAKE) --no-print-directory $(BUILD)/libtare-cuda.so $(CU_BENCH) && tools/check_ptxas.sh $(CU_OBJS:.o=.log); fi
# The GPU tests on the GPU of this machine.
gpu-check: tests cuda
	@tools/gpu_check.sh $(BUILD)
.SECONDARY: $(CU_OBJS)
$(BUILD)/libtare-cuda.so: $(CU_OBJS)
	@echo "  NVCC  $@"
	@$(NVCC) -shared -cudart static -Xlinker -z,defs -o $@ $^ -ldl
$(BUILD)/cuda/%.o: src/%.cu $(wildcard src/kern/cuda/*.cuh src/kern/cuda/*.h) Makefile
	@mkdir -p $(@D)
	@echo "  NVCC  $<"
	@$(NVCC) $(NVFLAGS) $(if $(findstring /plain_,$<),$(NV_older)) -c -o $@ $< >$(@:.o=.log) 2>&1 || { cat $(@:.o=.log); exit 1; }
$(BUILD)/cuda/libkern.a: $(CU_OBJS) $(CU_PACK)
	@rm -f $@ && ar rcs $@ $^
$(BUILD)/cuda/bench/%: bench/cuda/%.cu $(BUILD)/cuda/libkern.a $(wildcard bench/cuda/*.cuh)
	@mkdir -p $(@D)
	@echo "  NVCC  $@"
	@$(NVCC) $(NVFLAGS) -cudart static -o $@ $< $(BUILD)/cuda/libkern.a >$@.log 2>&1 || { cat $@.log; exit 1; }

eval: all
	@tools/eval_full.sh $(BUILD)
golden:
	@tools/golden.sh $(BUILD)
docs: all
	@$(BUILD)/tare completions markdown > docs/OPTIONS.md
	@python3 tools/gen_docs.py
format:
	@clang-format -i $$(find src tests bench -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cc')

PREFIX ?= /usr/local
DESTDIR ?=
install: all
	install -D -m 755 $(BUILD)/tare $(DESTDIR)$(PREFIX)/bin/tare
	install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions $(DESTDIR)$(PREFIX)/share/zsh/vendor-completions \
	    $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d
	$(BUILD)/tare completions bash > $(DESTDIR)$(PREFIX)/share/bash-completion/completions/tare
	$(BUILD)/tare completions zsh > $(DESTDIR)$(PREFIX)/share/zsh/vendor-completions/_tare
	$(BUILD)/tare completions fish > $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/tare.fish

# Everything a person or CI does with a checkout. `make setup` makes .venv and is part of every other target.

PYTHON_IN_VENV := .venv/bin/python
PYTEST := $(PYTHON_IN_VENV) -m pytest -n auto --maxprocesses=4
# Tests whose subject is the device: kernels, the runtime, layers, models, training; then what the zoo does on it.
DRIVER_TESTS := tests/ops tests/nn tests/runtime tests/models tests/training
# What another driver and compiler can break: kernels, and that models still say the same.
MESA22_TESTS := tests/ops tests/runtime tests/models
DEVICE_TESTS := $(DRIVER_TESTS) tests/generation tests/zoo/test_train.py tests/zoo/test_quantize.py tests/zoo/test_calibrate.py \
	tests/zoo/test_error_feedback.py tests/zoo/test_evaluate.py tests/zoo/test_load.py

.PHONY: help setup demo test lint typecheck imports format shaders fuzz bench bench-quality bench-train bench-finetune test-validation test-portable test-mesa22 clean

help:
	@echo 'make setup            .venv with oazoo and its tools, and a Vulkan driver when no device answers'
	@echo 'make demo             fetch SmolLM2, convert it, pack it to 8 and 4 bits, let each answer a prompt'
	@echo 'make test             the whole suite, with lint, types and layering'
	@echo 'make test-validation  the device tests under the Khronos validation layer'
	@echo 'make test-portable    ops and models on the kernels that GPUs run'
	@echo 'make test-mesa22      the device tests on Debian 12'"'"'s own Mesa 22.3'
	@echo 'make lint typecheck imports format    one check at a time; format also mends'
	@echo 'make shaders          compile shaders/*.slang to shaders/spirv'
	@echo 'make fuzz READER=…    ten minutes of one reader under a fuzzer; SECONDS=… for another time'
	@echo 'make bench            the numbers of docs/performance.md'
	@echo 'make bench-quality    perplexity and divergence of SmolLM2, quantised in each way (minutes)'
	@echo 'make bench-train      a step of training beside PyTorch; TORCH=… names a Python that has it'
	@echo 'make bench-finetune   a quarter of an hour of LoRA on text of a strange style (needs Debian'"'"'s dict-gcide)'
	@echo 'make clean            remove what these targets built, but not .venv'

setup:
	@sh tools/setup.sh

demo: setup
	@$(PYTHON_IN_VENV) tools/demo.py

test: setup
	@$(PYTEST)

lint: setup
	@$(PYTHON_IN_VENV) -m ruff check .
	@$(PYTHON_IN_VENV) -m ruff format --check .

format: setup
	@$(PYTHON_IN_VENV) -m ruff check --fix .
	@$(PYTHON_IN_VENV) -m ruff format .

typecheck: setup
	@$(PYTHON_IN_VENV) tools/check_tree.py types

imports: setup
	@$(PYTHON_IN_VENV) tools/check_tree.py imports

shaders: setup
	@$(PYTHON_IN_VENV) -m oazoo.shaders.compile

# In a process of the lowest priority; see tests/README.md.
READER ?= safetensors
SECONDS ?= 600
fuzz: setup
	@$(PYTHON_IN_VENV) -m pip install --quiet -r tests/fuzz/requirements.txt
	@nice -n 19 $(PYTHON_IN_VENV) tests/fuzz/fuzz_readers.py $(READER) $(SECONDS)

bench: setup
	@$(PYTHON_IN_VENV) tools/bench.py

bench-quality: setup
	@$(PYTHON_IN_VENV) tools/bench_quality.py

# TORCH=… a Python that has PyTorch; without one our step is measured alone.
bench-train: setup
	@$(PYTHON_IN_VENV) tools/bench_train.py $(if $(TORCH),--torch $(TORCH))

bench-finetune: setup
	@$(PYTHON_IN_VENV) tools/finetune_text.py build/finetune/text $(DICTIONARY)
	@$(PYTHON_IN_VENV) tools/bench_finetune.py build/finetune/text build/finetune/run

test-validation: setup
	@OAZOO_VALIDATION=1 $(PYTEST) -m "not heavy" $(DEVICE_TESTS)

# The kernels that a GPU would run: shared memory, no assumption about subgroups.
test-portable: setup
	@OAZOO_PORTABLE_KERNELS=1 $(PYTEST) -m "not heavy" tests/ops tests/models

test-mesa22: setup
	@sh tools/mesa22.sh
	@VK_DRIVER_FILES="$(CURDIR)/build/mesa22/lvp_icd.json" $(PYTEST) -m "not heavy" $(MESA22_TESTS)

clean:
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

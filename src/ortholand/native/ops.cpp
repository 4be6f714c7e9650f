// What compiled code is to torch: the operations torch.ops.ortholand.*, on libtorch's stable ABI.
//
// Everything is checked here, before anything is moved: beyond this file a wrong address or length
// reads or overwrites other memory. Negated views, subclasses and transforms' tensors do not get
// this far, or with values of their own: torch's dispatcher and optim/engines/compiled.py see to it.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "steps.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

using Landing = void (*)(const Options*, Parameter*, int, int);
using Tall = void (*)(const Options*, Parameter*, int, int64_t, int);

namespace {

constexpr int64_t LARGEST_P = 128;       // as in tiles.h
constexpr int64_t LANES_UP_TO = 8;       // columns of matrices that are computed side by side,
constexpr int64_t LANES_FROM = 4;        // if there are so many of them,
constexpr int64_t LARGEST_IN_LANES = 512;  // and they have no more entries than this

// Why a weight is refused; named again in optim/engines/compiled.py.
enum Refusal : int64_t {
    TAKEN = 0, DEVICE = -1, TYPE = -2, SHAPE = -3, STATE_SHAPE = -4, LAYOUT = -5, OTHER_LAYOUT = -6,
    MEMORY = -7, SIZE = -8, NO_KERNELS = -9
};

// Compiled landing.cpp and tall.cpp, by type (float, double) and columns: 0 is for all matrices, and
// up to LANES_UP_TO columns there is code of matrices side by side. They are libraries of their own.
// `asked`: somebody has looked for them, and they may be missing all the same.
struct Kernels {
    Landing landing;
    Tall tall;
    bool asked;
} kernels_of[2][LANES_UP_TO + 1];

// What is read of a tensor, once.
struct Seen {
    void* start;
    const int64_t *sizes, *strides;
    int64_t dim, numel;
    int32_t dtype;
    bool on_cpu, in_memory;

    explicit Seen(const Tensor& tensor) {
        const AtenTensorHandle handle = tensor.get();
        int32_t device, layout;
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(handle, &layout));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &dtype));
        on_cpu = device == CPU && layout == STRIDED;
        in_memory = false, start = nullptr, sizes = strides = nullptr, dim = numel = 0;
        if (!on_cpu) return;
        int64_t *size, *stride, offset, bytes;
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dim));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle, &numel));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &size));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &stride));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(handle, &offset));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(handle, &bytes));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &start));
        sizes = size, strides = stride;
        // Only dense tensors are taken: `numel` numbers from the first on.
        in_memory = start && bytes >= (offset + numel) * item_size();
    }

    bool is_float() const { return dtype == FLOAT; }
    bool is_known() const { return dtype == FLOAT || dtype == DOUBLE; }
    int64_t item_size() const { return dtype == FLOAT ? 4 : 8; }
    bool has_shape_of(const Seen& other) const {
        return dim == other.dim && std::equal(sizes, sizes + dim, other.sizes);
    }
    bool has_layout_of(const Seen& other) const {
        for (int64_t i = 0; i < dim; ++i)
            if (sizes[i] != 1 && strides[i] != other.strides[i]) return false;
        return true;
    }
    // Whether the numbers are without gaps, in any order of dimensions.
    bool is_dense() const {
        int64_t expected = 1;
        for (int64_t done = 0, left = numel; left > 1; left = numel / expected, ++done) {
            int64_t next = -1;
            for (int64_t i = 0; i < dim; ++i)
                if (sizes[i] != 1 && strides[i] == expected) next = i;
            if (next < 0 || done == dim) return false;
            expected *= sizes[next];
        }
        return expected == numel;
    }
    bool is_contiguous() const {
        int64_t expected = 1;
        for (int64_t i = dim - 1; i >= 0; --i) {
            if (sizes[i] != 1 && strides[i] != expected) return false;
            expected *= sizes[i];
        }
        return true;
    }

    static const int32_t CPU, STRIDED, FLOAT, DOUBLE;
};
const int32_t Seen::CPU = aoti_torch_device_type_cpu();
const int32_t Seen::STRIDED = aoti_torch_layout_strided();
const int32_t Seen::FLOAT = aoti_torch_dtype_float32();
const int32_t Seen::DOUBLE = aoti_torch_dtype_float64();

// A weight with its gradient and state, as the kernels take it: n x p matrices, n >= p.
struct Row {
    Parameter parameter;
    int64_t n, p, index;
    bool is_float;

    bool operator<(const Row& other) const {
        if (is_float != other.is_float) return is_float;
        return n != other.n ? n < other.n : p < other.p;
    }
    bool is_like(const Row& other) const {
        return n == other.n && p == other.p && is_float == other.is_float;
    }
};

// Wide matrices are tall ones, transposed.
void set_matrix(Row& row, int64_t rows, int64_t columns, int64_t down, int64_t across) {
    if (rows < columns) std::swap(rows, columns), std::swap(down, across);
    row.n = rows, row.p = columns;
    row.parameter.row_stride = down;
    row.parameter.column_stride = columns == 1 ? 1 : across;  // means nothing for one column
}

// One matrix, (first dimension) x (all others), the latter dense in any order: that only permutes
// the columns, and a step does not depend on it, if gradient and state have the same.
bool set_flat(Row& row, const Seen& X) {
    const int64_t rows = X.sizes[0], columns = X.numel / rows;
    int64_t first = 0;
    for (int64_t i = 1; i < X.dim; ++i)
        if (X.sizes[i] != 1 && (!first || X.strides[i] < first)) first = X.strides[i];
    row.parameter.count = row.parameter.inner = 1;
    if ((first == 1 || !first) && (rows == 1 || X.strides[0] == columns))
        set_matrix(row, rows, columns, columns, 1);
    else if (first == rows && X.strides[0] == 1)
        set_matrix(row, rows, columns, 1, rows);
    else
        return false;
    return true;
}

// A stack of the matrices in the last two dimensions, in up to two levels.
bool set_stack(Row& row, const Seen& X) {
    int64_t size[2] = {1, 1}, stride[2] = {0, 0};
    int levels = 0;
    for (int64_t i = X.dim - 3; i >= 0; --i) {
        if (X.sizes[i] == 1) continue;
        if (levels && X.strides[i] == size[levels - 1] * stride[levels - 1]) {
            size[levels - 1] *= X.sizes[i];
        } else {
            if (levels == 2) return false;
            size[levels] = X.sizes[i], stride[levels++] = X.strides[i];
        }
    }
    Parameter& q = row.parameter;
    q.count = size[0] * size[1];
    q.inner = size[0], q.inner_stride = stride[0];
    q.outer_stride = levels == 2 ? stride[1] : q.inner * q.inner_stride;
    set_matrix(row, X.sizes[X.dim - 2], X.sizes[X.dim - 1], X.strides[X.dim - 2],
               X.strides[X.dim - 1]);
    return true;
}

// Everything that a weight steps with. Lists of state that a step does not have are empty.
struct Given {
    const Tensors &weights, &gradients, &matrix_state, &square_state, &step_state;
    bool kernels;  // the view

    void check_lengths() const {
        const size_t n = weights.size();
        bool fit = gradients.size() == n;
        for (const Tensors* list : {&matrix_state, &square_state, &step_state})
            fit &= list->empty() || list->size() == n;
        STD_TORCH_CHECK(fit, "ortholand: each weight must have a gradient and its state.");
    }

    Refusal read(size_t i, Row& row) const {
        const Seen X(weights[i]), G(gradients[i]);
        Parameter& q = row.parameter;
        q = Parameter{};
        row.index = int64_t(i);
        if (!X.on_cpu || !G.on_cpu) return DEVICE;
        if (!X.is_known() || G.dtype != X.dtype) return TYPE;
        row.is_float = X.is_float();
        if (X.dim < 2 || !X.numel) return SIZE;
        if (!G.has_shape_of(X)) return SHAPE;
        if (!X.is_dense() || !(kernels || X.dim == 2 ? set_stack(row, X) : set_flat(row, X)))
            return LAYOUT;
        if (row.p > LARGEST_P) return SIZE;
        if (!X.in_memory) return MEMORY;
        q.X = X.start;
        Refusal found = read_matrix(G, X, q.G);
        if (!found && !matrix_state.empty())
            found = read_matrix(Seen(matrix_state[i]), X, q.matrix_state);
        if (!found && !square_state.empty())
            found = read_numbers(Seen(square_state[i]), X, q, q.square_state);
        if (!found && !step_state.empty())
            found = read_numbers(Seen(step_state[i]), X, q, q.step_state);
        return found;
    }

    template <class Pointer>
    static Refusal read_matrix(const Seen& A, const Seen& X, Pointer& start) {
        if (!A.on_cpu) return DEVICE;
        if (A.dtype != X.dtype) return TYPE;
        if (!A.has_shape_of(X)) return STATE_SHAPE;
        if (!A.has_layout_of(X)) return OTHER_LAYOUT;
        start = A.start;
        return A.in_memory ? TAKEN : MEMORY;
    }

    static Refusal read_numbers(const Seen& a, const Seen& X, const Parameter& q, void*& start) {
        if (!a.on_cpu) return DEVICE;
        if (a.dtype != X.dtype) return TYPE;
        if (a.numel != q.count) return STATE_SHAPE;
        if (!a.is_contiguous()) return OTHER_LAYOUT;
        start = a.start;
        return a.in_memory ? TAKEN : MEMORY;
    }
};

// Calls f(first row, number of rows) for the rows of each type and shape.
template <class F>
void by_shape(std::vector<Row>& rows, F f) {
    if (!std::is_sorted(rows.begin(), rows.end())) std::stable_sort(rows.begin(), rows.end());
    for (size_t first = 0, last; first < rows.size(); first = last) {
        for (last = first; last < rows.size() && rows[last].is_like(rows[first]);) ++last;
        f(&rows[first], last - first);
    }
}

// Which of `kernels_of` would step these rows best.
int64_t columns_of(const Row* rows, size_t some) {
    const int64_t n = rows->n, p = rows->p;
    if (p > LANES_UP_TO || (n > p && n * p > LARGEST_IN_LANES)) return 0;
    int64_t count = 0;
    for (size_t i = 0; i < some && count < LANES_FROM; ++i) count += rows[i].parameter.count;
    return count < LANES_FROM ? 0 : p;
}

void step_rows(const Options& o, Row* rows, size_t some) {
    const int n = int(some), p = int(rows->p);
    const Kernels* all = kernels_of[rows->is_float ? 0 : 1];
    const Kernels* kernels = &all[columns_of(rows, some)];
    if (!kernels->landing) kernels = all;
    std::vector<Parameter> parameters(some);
    for (size_t i = 0; i < some; ++i) parameters[i] = rows[i].parameter;
    if (rows->n == p)
        kernels->landing(&o, parameters.data(), n, p);
    else
        kernels->tall(&o, parameters.data(), n, rows->n, p);
    for (size_t i = 0; i < some; ++i) rows[i].parameter = parameters[i];
}

// For each weight why it cannot step, a negative number; or, if nobody has looked for its kernels
// yet, 1 + their columns; or 0. Nothing at all if that is 0 for every weight.
std::vector<int64_t> landing_check(const Tensors weights, const Tensors gradients,
                                   const Tensors matrix_state, const Tensors square_state,
                                   const Tensors step_state, bool kernels) {
    const Given given{weights, gradients, matrix_state, square_state, step_state, kernels};
    given.check_lengths();
    std::vector<int64_t> answers(weights.size(), 0);
    std::vector<Row> rows;
    bool any = false;
    rows.reserve(weights.size());
    for (size_t i = 0; i < weights.size(); ++i) {
        Row row;
        answers[i] = given.read(i, row);
        if (answers[i]) any = true;
        else rows.push_back(row);
    }
    by_shape(rows, [&](const Row* some, size_t n) {
        const Kernels* all = kernels_of[some->is_float ? 0 : 1];
        int64_t columns = columns_of(some, n), answer = TAKEN;
        if (!all[0].asked) columns = 0;
        if (!all[columns].asked) answer = 1 + columns;
        else if (!all[0].landing) answer = NO_KERNELS;
        if (answer == TAKEN) return;
        for (size_t i = 0; i < n; ++i) answers[some[i].index] = answer;
        any = true;
    });
    if (!any) answers.clear();
    return answers;
}

Options options_of(const std::vector<double>& numbers, const std::vector<int64_t>& choices) {
    STD_TORCH_CHECK(numbers.size() == 12 && choices.size() == 5,
                    "ortholand: a step has 12 numbers and 5 choices.");
    uint32_t threads;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
    const auto& x = numbers;
    const auto choice = [&](int i) { return int32_t(choices[i]); };
    return {x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11],
            choice(0), choice(1), choice(2), choice(3), choice(4), int32_t(threads)};
}

// Step the weights; for each of them how many matrices were skipped, and how many limited.
Tensor landing_step(const Tensors weights, const Tensors gradients, const Tensors matrix_state,
                    const Tensors square_state, const Tensors step_state, bool kernels,
                    const std::vector<double> numbers, const std::vector<int64_t> choices) {
    const Given given{weights, gradients, matrix_state, square_state, step_state, kernels};
    given.check_lengths();
    const Options o = options_of(numbers, choices);
    STD_TORCH_CHECK(o.moments == NONE || !matrix_state.empty(), "ortholand: no state.");
    STD_TORCH_CHECK(o.moments != ADAM || (!square_state.empty() && !step_state.empty()),
                    "ortholand: no second moments.");
    std::vector<Row> rows(weights.size());
    for (size_t i = 0; i < weights.size(); ++i) {
        const Refusal refusal = given.read(i, rows[i]);
        STD_TORCH_CHECK(refusal == TAKEN, "ortholand: weight ", i, " of a compiled step cannot be "
                        "taken (", int64_t(refusal), "): ask landing_check first.");
    }
    for (const Row& row : rows)
        STD_TORCH_CHECK(kernels_of[row.is_float ? 0 : 1][0].landing, "ortholand: no kernels.");
    const int64_t shape[2] = {2, int64_t(weights.size())}, strides[2] = {shape[1], 1};
    AtenTensorHandle made;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
        2, shape, strides, aoti_torch_dtype_int64(), Seen::CPU, 0, &made));
    Tensor counts(made);
    int64_t* count = static_cast<int64_t*>(counts.data_ptr());
    by_shape(rows, [&](Row* some, size_t n) { step_rows(o, some, n); });
    for (const Row& row : rows) {
        count[row.index] = row.parameter.skipped;
        count[shape[1] + row.index] = row.parameter.limited;
    }
    return counts;
}

template <class T>
bool is_below(const T* x, int64_t n, T bound) {
    int beyond = 0;  // or-ed: a sum of very many would overflow
#pragma omp simd reduction(| : beyond)
    for (int64_t j = 0; j < n; ++j) beyond |= !(std::fabs(x[j]) < bound);
    return !beyond;
}

// Whether |x| < limit for every x in dense arrays; false for NaN, and for what cannot be read.
bool all_below(const Tensors tensors, double limit) {
    for (const Tensor& tensor : tensors) {
        const Seen x(tensor);
        if (!x.on_cpu || !x.is_known()) return false;
        if (!x.numel) continue;
        if (!x.is_dense() || !x.in_memory) return false;
        const bool below =
            x.is_float() ? is_below(static_cast<const float*>(x.start), x.numel, float(limit))
                         : is_below(static_cast<const double*>(x.start), x.numel, limit);
        if (!below) return false;
    }
    return true;
}

void define(torch::stable::detail::StableLibrary& library) {
    library.def(
        "landing_check(Tensor[] weights, Tensor[] gradients, Tensor[] matrix_state, "
        "Tensor[] square_state, Tensor[] step_state, bool kernels) -> int[]");
    library.def(
        "landing_step(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] matrix_state, "
        "Tensor(c!)[] square_state, Tensor(d!)[] step_state, bool kernels, float[] numbers, "
        "int[] choices) -> Tensor");
    library.def("all_below(Tensor[] tensors, float limit) -> bool");
}

void implement(torch::stable::detail::StableLibrary& library) {
    library.impl("landing_check", TORCH_BOX(&landing_check));
    library.impl("landing_step", TORCH_BOX(&landing_step));
    library.impl("all_below", TORCH_BOX(&all_below));
}

}  // namespace

extern "C" {

// Give torch the operations, in a namespace. Not when the library is loaded, as is usual: there an
// error would end the process. 0, or 1 if torch would not have them.
int ortholand_register(const char* space) {
    using torch::stable::detail::StableLibrary;
    try {
        // Kept for ever: they would be taken back otherwise.
        define(*new StableLibrary(StableLibrary::Kind::FRAGMENT, space, nullptr, __FILE__, __LINE__));
        implement(*new StableLibrary(StableLibrary::Kind::IMPL, space, "CPU", __FILE__, __LINE__));
    } catch (...) {
        return 1;
    }
    return 0;
}

// Kernels of a type and some columns, or null if there are none.
void ortholand_add_kernels(int is_double, int columns, Landing landing, Tall tall) {
    if (columns >= 0 && columns <= LANES_UP_TO)
        kernels_of[is_double ? 1 : 0][columns] = {landing, tall, true};
}
}

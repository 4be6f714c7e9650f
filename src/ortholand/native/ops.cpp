// What compiled code is to torch: the operations torch.ops.ortholand.*, on libtorch's stable ABI.
//
// Everything is checked here, before anything is moved: beyond this file a wrong address or length
// reads or overwrites other memory. Negated views, subclasses and transforms' tensors do not get
// this far, or with values of their own: torch's dispatcher and optim/engines/compiled.py see to it.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

// Only its functions in C: what is written in C++ there asks for a newer libstdc++ than wheels may.
#include <torch/csrc/stable/c/shim.h>

#include "steps.h"

using Landing = void (*)(const Options*, Parameter*, int, int);
using Tall = void (*)(const Options*, Parameter*, int, int64_t, int);

namespace {

constexpr int64_t LARGEST_P = 128;       // as in tiles.h
constexpr int64_t LANES_UP_TO = 8;       // columns of matrices that are computed side by side,
constexpr int64_t LANES_FROM = 4;        // if there are so many of them,
constexpr int64_t SLICES_FROM = 512;     // or if one has so many entries, and few columns:
constexpr int64_t SLICES_UP_TO = 4;      // its rows are dealt out then

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

// What torch hands over ---------------------------------------------------------------------------

[[noreturn]] void fail(const char* why) { throw std::runtime_error(why); }

void check(AOTITorchError error) {
    if (error) fail("ortholand: torch cannot read a tensor.");
}

// Values on torch's stack are in the first bytes of 8.
template <class T>
T as(StableIValue value) {
    T result;
    std::memcpy(&result, &value, sizeof(T));
    return result;
}

template <class T>
StableIValue from(T value) {
    StableIValue result = 0;
    std::memcpy(&result, &value, sizeof(T));
    return result;
}

// Tensors, one or a list, which are ours and must be deleted.
class Tensors {
    std::vector<AtenTensorHandle> handles;

public:
    Tensors() = default;
    Tensors(const Tensors&) = delete;
    ~Tensors() {
        for (AtenTensorHandle handle : handles) aoti_torch_delete_tensor_object(handle);
    }
    void take(StableIValue value) { handles.push_back(as<AtenTensorHandle>(value)); }
    void take_list(StableIValue value) {
        const auto list = as<StableListHandle>(value);
        size_t n = 0;
        AOTITorchError error = torch_list_size(list, &n);
        handles.reserve(n);
        for (size_t i = 0; i < n && !error; ++i) {
            StableIValue item;
            error = torch_list_get_item(list, i, &item);
            if (!error) take(item);
        }
        torch_delete_list(list);
        check(error);
    }
    size_t size() const { return handles.size(); }
    AtenTensorHandle operator[](size_t i) const { return handles[i]; }
    auto begin() const { return handles.begin(); }
    auto end() const { return handles.end(); }
};

// What is read of a tensor, once.
struct Seen {
    void* start;
    const int64_t *sizes, *strides;
    int64_t dim, numel;
    int32_t dtype;
    bool on_cpu, in_memory;

    explicit Seen(AtenTensorHandle handle) {
        int32_t device, layout;
        check(aoti_torch_get_device_type(handle, &device));
        check(aoti_torch_get_layout(handle, &layout));
        check(aoti_torch_get_dtype(handle, &dtype));
        on_cpu = device == CPU && layout == STRIDED;
        in_memory = false, start = nullptr, sizes = strides = nullptr, dim = numel = 0;
        if (!on_cpu) return;
        int64_t *size, *stride, offset, bytes;
        check(aoti_torch_get_dim(handle, &dim));
        check(aoti_torch_get_numel(handle, &numel));
        check(aoti_torch_get_sizes(handle, &size));
        check(aoti_torch_get_strides(handle, &stride));
        check(aoti_torch_get_storage_offset(handle, &offset));
        check(aoti_torch_get_storage_size(handle, &bytes));
        check(aoti_torch_get_data_ptr(handle, &start));
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

// The options of a step, and the view of its weights, from a tensor of numbers.
struct Settings {
    Options options;
    bool kernels;  // the view

    explicit Settings(const Seen& seen) {
        if (!seen.on_cpu || seen.dtype != Seen::DOUBLE || seen.numel != 18 ||
            !seen.is_contiguous() || !seen.in_memory)
            fail("ortholand: settings are 18 numbers of float64, on the CPU.");
        const double* x = static_cast<const double*>(seen.start);
        const auto choice = [x](int i) { return int32_t(x[i]); };
        uint32_t threads;
        check(torch_get_num_threads(&threads));
        options = {x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11],
                   choice(12), choice(13), choice(14), choice(15), choice(16), int32_t(threads)};
        kernels = x[17] != 0;
    }
};

// Everything that weights step with: first all of them, then their state, one kind after the other.
struct Given {
    const Tensors &moved, &gradients;
    size_t states;  // how many each weight has
    bool kernels;

    Given(const Tensors& moved, const Tensors& gradients, const Settings& settings)
        : moved(moved), gradients(gradients), kernels(settings.kernels) {
        const int moments = settings.options.moments;
        states = moments == ADAM ? 3 : moments == MOMENTUM ? 1 : 0;
        if (moved.size() != (1 + states) * gradients.size())
            fail("ortholand: each weight must have a gradient and its state.");
    }

    AtenTensorHandle state(size_t kind, size_t i) const {
        return moved[(1 + kind) * gradients.size() + i];
    }

    Refusal read(size_t i, Row& row) const {
        const Seen X(moved[i]), G(gradients[i]);
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
        if (!found && states > 0) found = read_matrix(Seen(state(0, i)), X, q.matrix_state);
        if (!found && states > 1) found = read_numbers(Seen(state(1, i)), X, q.square_state);
        if (!found && states > 2) found = read_numbers(Seen(state(2, i)), X, q.step_state);
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

    // A number for each matrix.
    Refusal read_numbers(const Seen& a, const Seen& X, void*& start) const {
        const int64_t batch = kernels ? X.dim - 2 : 0;
        if (!a.on_cpu) return DEVICE;
        if (a.dtype != X.dtype) return TYPE;
        if (a.dim != batch || !std::equal(a.sizes, a.sizes + batch, X.sizes)) return STATE_SHAPE;
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
    const bool large = n > p && n * p > SLICES_FROM;
    if (p > LANES_UP_TO || (large && p > SLICES_UP_TO)) return 0;
    int64_t count = large ? LANES_FROM : 0;
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

// For each row that cannot step for want of kernels, what to do about it.
bool ask_for_kernels(std::vector<Row>& rows, std::vector<int64_t>& answers) {
    bool any = false;
    by_shape(rows, [&](const Row* some, size_t n) {
        const Kernels* all = kernels_of[some->is_float ? 0 : 1];
        const int64_t columns = all[0].asked ? columns_of(some, n) : 0;
        int64_t answer = TAKEN;
        if (!all[columns].asked) answer = 1 + columns;
        else if (!all[0].landing) answer = NO_KERNELS;
        if (answer == TAKEN) return;
        for (size_t i = 0; i < n; ++i) answers[some[i].index] = answer;
        any = true;
    });
    return any;
}

// Step weights, or only check whether they can step.
//
// Either all step or none does. Gives nothing if all did, or can, without further ado. Else a list
// that begins with 1 if they did, and how many matrices of each weight were skipped, and limited; or
// with 0 if none did, and for each weight a negative number, why it cannot step; or 0, if it can;
// or 1 + the columns for which kernels must be added first, if there are any.
std::vector<int64_t> landing_step(const Tensors& moved, const Tensors& gradients,
                                  const Settings& settings, bool only_check) {
    const Given given(moved, gradients, settings);
    const size_t n = gradients.size();
    std::vector<Row> rows(n);
    std::vector<int64_t> answers(n, TAKEN);
    bool any = false;
    for (size_t i = 0; i < n; ++i) any |= (answers[i] = given.read(i, rows[i])) != TAKEN;
    if (any)
        rows.erase(std::remove_if(rows.begin(), rows.end(),
                                  [&](const Row& row) { return answers[row.index] != TAKEN; }),
                   rows.end());
    any |= ask_for_kernels(rows, answers);
    if (any) answers.insert(answers.begin(), 0);
    if (any) return answers;
    answers.clear();
    if (only_check) return answers;
    by_shape(rows, [&](Row* some, size_t count) { step_rows(settings.options, some, count); });
    for (const Row& row : rows) any |= row.parameter.skipped || row.parameter.limited;
    if (!any) return answers;
    answers.assign(1 + 2 * n, 1);
    for (const Row& row : rows) {
        answers[1 + row.index] = row.parameter.skipped;
        answers[1 + n + row.index] = row.parameter.limited;
    }
    return answers;
}

template <class T>
bool is_below(const T* x, int64_t n, T bound) {
    int beyond = 0;  // or-ed: a sum of very many would overflow
#pragma omp simd reduction(| : beyond)
    for (int64_t j = 0; j < n; ++j) beyond |= !(std::fabs(x[j]) < bound);
    return !beyond;
}

// Whether |x| < limit for every x in dense arrays; false for NaN, and for what cannot be read.
bool all_below(const Tensors& tensors, double limit) {
    for (AtenTensorHandle tensor : tensors) {
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

// The operations, as torch calls them ------------------------------------------------------------

void boxed_landing_step(StableIValue* stack, uint64_t, uint64_t) {
    Tensors moved, gradients, settings;
    settings.take(stack[2]);
    moved.take_list(stack[0]), gradients.take_list(stack[1]);
    const std::vector<int64_t> answers =
        landing_step(moved, gradients, Settings(Seen(settings[0])), as<bool>(stack[3]));
    StableListHandle list;
    check(torch_new_list_reserve_size(answers.size(), &list));
    for (int64_t answer : answers) check(torch_list_push_back(list, from(answer)));
    stack[0] = from(list);
}

void boxed_all_below(StableIValue* stack, uint64_t, uint64_t) {
    Tensors tensors;
    tensors.take_list(stack[0]);
    stack[0] = from(all_below(tensors, as<double>(stack[1])));
}

bool register_all(const char* space) {
    TorchLibraryHandle names, code;  // kept for ever: the operations would be taken back otherwise
    return !(aoti_torch_library_init_fragment(space, __FILE__, __LINE__, &names) ||
             aoti_torch_library_init_impl(space, "CPU", __FILE__, __LINE__, &code) ||
             aoti_torch_library_def(names,
                                    "landing_step(Tensor(a!)[] moved, Tensor[] gradients, "
                                    "Tensor settings, bool only_check) -> int[]") ||
             aoti_torch_library_def(names, "all_below(Tensor[] tensors, float limit) -> bool") ||
             torch_library_impl(code, "landing_step", boxed_landing_step, TORCH_ABI_VERSION) ||
             torch_library_impl(code, "all_below", boxed_all_below, TORCH_ABI_VERSION));
}

}  // namespace

extern "C" {

// Give torch the operations, in a namespace. Not when the library is loaded, as is usual: there an
// error would end the process. 0, or 1 if torch would not have them.
int ortholand_register(const char* space) { return register_all(space) ? 0 : 1; }

// Kernels of a type and some columns, or null if there are none.
void ortholand_add_kernels(int is_double, int columns, Landing landing, Tall tall) {
    if (columns >= 0 && columns <= LANES_UP_TO)
        kernels_of[is_double ? 1 : 0][columns] = {landing, tall, true};
}
}
